"""Floor 1: functions on tensors only; every fast path has a slow twin in `reference.py`."""
