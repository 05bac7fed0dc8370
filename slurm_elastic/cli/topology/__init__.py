"""`selastic topology`: the network as text and as a picture."""
