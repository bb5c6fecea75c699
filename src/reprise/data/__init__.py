"""From sources of text to the windows of a training step: readers, corpora, tokenizers, token shards, lanes."""
