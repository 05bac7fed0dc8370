"""`selastic install` and `selastic uninstall`: the files of a site that pip does not place."""
