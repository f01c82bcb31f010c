"""How blocks cross the bus: devices, host memory, slots, copies."""
