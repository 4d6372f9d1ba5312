"""The page watches the run of the quick start, which has just saved."""

go_on_after("README.md")
