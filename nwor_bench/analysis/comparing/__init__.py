"""Two runs, BASE and NEW: may they be compared, and how much did each cell change?"""
