"""Windows counted on the host or late from the device, and kept until they are drained."""
