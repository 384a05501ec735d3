"""The seam to Lightning: every access that Lightning does not document or type, each with its reason."""
