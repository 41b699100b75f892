"""A running server in which modes or draft counts are interleaved: its metrics, read and told.

What a server publishes comes from `plugin/live.py`.
"""
