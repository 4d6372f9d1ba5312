"""A run as its output dir tells of it, look after look: what is known of it, and what of that is shown."""
