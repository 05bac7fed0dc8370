"""Policy `icefrog`: layer elasticity as a dimension of scheduling."""
