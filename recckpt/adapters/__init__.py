"""Adapters that find tables of TorchRec and FBGEMM in a model and make them live tables."""
