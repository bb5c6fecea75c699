"""Sources in Triton, imported late by `gpu_window.py` and `gpu_scan.py`: not at all where Triton is missing."""
