"""The phases decide: one package per phase declares its gates, and the modules beside run them.

Data flows one way: plan -> phase -> gate -> evidence -> report.
"""
