"""Large-scale recurrent language-model pretraining."""

import os

# PyTorch reads this at its first allocation. Windows of activations are fresh memory in every step, and the system
# hands it out in pages of 4 KiB, zeroed one by one, unless it is asked for large ones.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
