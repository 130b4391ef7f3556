-- Beside MLflow's own database, which the image makes: who may sign in at MLflow, and Prefect's.
create database signin;
create database prefect;
