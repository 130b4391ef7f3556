"""The critics at work and under test: futures and verdicts, the audit, the gate, values, search by V."""
