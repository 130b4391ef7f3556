"""Environments of other libraries as ours, and ours as theirs. Each library is needed only when used. Ours."""
