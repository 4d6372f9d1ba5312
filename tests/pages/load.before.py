"""The page goes on with the run of the quick start."""

go_on_after("README.md")
