"""What happens around the training step: metrics, recovery, gradients."""
