"""Dense state: what torch saves in ``.pt`` files, and how it is checked and read back."""
