"""The kernel log: which lines mean trouble, what they are about, which of them is the cause; Xid and SXid."""
