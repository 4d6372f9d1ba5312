"""Tables of TorchRec and FBGEMM as live ones: a guest, which finds them in a model and saves and loads them its way."""
