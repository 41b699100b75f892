"""Stored data of a run: its records, its header, and its folder."""
