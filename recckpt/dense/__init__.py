"""Dense state: saves it to ``.pt`` files that torch can load, checks the files and loads them."""
