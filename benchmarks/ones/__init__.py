"""Evolutionary search and predicted progress (ONES, SC'21), published and ours."""
