"""Predicted run times in the controller: trained in the background, shown, given to policies."""
