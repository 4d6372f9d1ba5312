"""Threads and ranks, and how ranks agree or find that one of them is lost."""
