"""Floor 2: recurrent cells, (input, state) -> (output, state). `README.md` says how to add one."""
