"""The coordinator: rounds, budgets, who trains, and where each client's window stands."""
