"""What each window did: counted on the host or late on the device, kept until it is drained."""
