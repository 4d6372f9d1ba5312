"""The hashtable embedding, and the one door through which its rows change."""
