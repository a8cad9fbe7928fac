// What the search of a built site finds: node site_search.js SITE QUERY... prints {query: [address]}.
// It runs the theme's own worker on the site's own index, as a browser does.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const folder = path.join(site, "assets", "javascripts", "workers");
const worker = fs.readdirSync(folder).find((name) => /^search\..*\.js$/.test(name));
const index = JSON.parse(fs.readFileSync(path.join(site, "search", "search_index.json"), "utf8"));

let listener, answered;
const self = {
  console,
  addEventListener: (_, added) => (listener = added),
  postMessage: (message) => answered(message.data),
};
self.self = self;
vm.runInNewContext(fs.readFileSync(path.join(folder, worker), "utf8"), self);

const [SETUP, QUERY] = [0, 2]; // types of the worker's messages
const ask = (type, data) =>
  new Promise((resolve) => {
    answered = resolve;
    listener({ data: { type, data } });
  });

(async () => {
  await ask(SETUP, { ...index, options: { suggest: true } });
  const found = {};
  for (const query of queries) {
    const { items } = await ask(QUERY, query);
    found[query] = items.map((sections) => sections[0].location);
  }
  console.log(JSON.stringify(found));
})();
