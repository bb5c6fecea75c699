"""Floor 3: who is here and which lanes are whose."""
