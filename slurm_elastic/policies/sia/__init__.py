"""Policy `sia`: GPU type, node and GPU counts by goodput (Sia, SOSP'23)."""
