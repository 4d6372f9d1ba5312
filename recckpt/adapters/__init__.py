"""Tables of TorchRec and FBGEMM as live tables: a guest, which finds them in a model and says how they are saved."""
