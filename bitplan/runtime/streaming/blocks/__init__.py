"""What a streamed block is: its parameters, their formats, their layout in bytes."""
