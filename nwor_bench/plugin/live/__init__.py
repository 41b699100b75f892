"""Off and stage in turn in a running server, and the ratio of their windows on its /metrics."""
