"""Statistics of gradients, gathered without stopping the device."""
