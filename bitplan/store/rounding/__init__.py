"""Better numbers in the same bytes: scales by weighted search, codes by error-compensated rounding."""
