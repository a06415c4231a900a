if (matchMedia("(prefers-color-scheme: dark)").matches) document.documentElement.classList.add("dark-mode");
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#docs",
  deepLinking: true,
  validatorUrl: null, // it would ask another host
  persistAuthorization: false, // a token is gone when the tab is
  defaultModelsExpandDepth: 0,
  tryItOutEnabled: true,
});
