"""Which drafts were accepted, from the ids or the counts that rejection sampling returned."""
