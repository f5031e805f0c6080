"""Programs made of programs: scaled out to more devices, split into a pipeline, in float8."""
