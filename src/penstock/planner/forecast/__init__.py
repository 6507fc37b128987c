"""Forecasts of a series of equally spaced values, such as arrivals a second: several methods, chosen by how they did."""
