"""The critics at work and under test: futures and verdicts, the audit, the gate, and values."""
