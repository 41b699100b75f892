"""The HTML page: nothing is loaded from elsewhere."""
