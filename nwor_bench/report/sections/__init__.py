"""The sections of a report: one file each, made from records."""
