"""Who may call what: certificates, bearer tokens, scopes."""
