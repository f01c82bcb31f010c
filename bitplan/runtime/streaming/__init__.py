"""Models whose blocks wait on the host and cross to the device when they are needed."""
