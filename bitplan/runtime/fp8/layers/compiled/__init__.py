"""What code that torch.compile generated calls for FP8 layers."""
