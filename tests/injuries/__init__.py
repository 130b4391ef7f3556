"""What a run may suffer, kind by kind; `tests/faults.py` counts what came of it.

bench      project folders, undisturbed runs, and how a disturbed one is compared with them
ends       signals at random moments, a full disk, a closed pipe, a clock that goes back
others     several pipelines at once; stores that another process holds
endpoints  an engine that answers late, wrongly or not at all; endpoint_child is that engine
bits       a flipped bit in every kind of artifact
"""
