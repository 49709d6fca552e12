"""Ground floor: operator registration, argument checks, kernel launches and tuning tables. Not public."""
