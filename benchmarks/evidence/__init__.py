"""What the figures of docs/results.md rest on beside studies: runs looked into, runs compared, theory in miniature."""
