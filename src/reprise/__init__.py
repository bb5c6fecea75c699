"""Large-scale recurrent language-model pretraining."""
