// A form made from a JSON schema: what a topic's jobs take, or a pipeline's config.

import { h } from "./dom.js";

/** Follow references; a type that may also be null is that type, left out if empty. */
function resolved(schema, root) {
  let found = schema;
  for (let hops = 0; found.$ref && hops < 20; hops += 1) {
    const path = found.$ref.replace(/^#\//, "").split("/").map((part) => part.replaceAll("~1", "/").replaceAll("~0", "~"));
    found = { ...path.reduce((at, name) => at?.[name], root), ...found, $ref: undefined };
  }
  const others = found.anyOf?.filter((one) => one.type !== "null");
  if (others?.length === 1) return { ...resolved(others[0], root), default: found.default, description: found.description ?? others[0].description };
  if (Array.isArray(found.type)) return { ...found, type: found.type.find((type) => type !== "null") };
  return found;
}

const isPlain = (schema) => ["string", "number", "integer", "boolean"].includes(schema.type) || schema.enum;

/** The fields of an object, by name; null if the schema is none of an object. */
export function fieldsOf(schema) {
  const object = schema && resolved(schema, schema);
  if (!object?.properties) return null;
  const required = new Set(object.required ?? []);
  return Object.entries(object.properties).map(([name, one]) => ({ name, schema: resolved(one, schema), required: required.has(name) }));
}

/** One field; `value` is what it begins with. */
export function fieldView({ name, schema, required }, value) {
  const start = value ?? schema.default;
  const id = `field-${name}`;
  const about = schema.description ? h("small", null, schema.description) : null;
  const label = h("span", null, name, required ? "" : h("small", null, " (optional)"));
  const props = { id, name, required: required && schema.type !== "boolean" };
  if (schema.type === "boolean") return h("label", { class: "check", key: name }, h("input", { type: "checkbox", ...props, checked: Boolean(start) }), name, " ", about);
  let input;
  if (schema.enum) input = h("select", { ...props, value: start === undefined || start === null ? "" : JSON.stringify(start) }, required ? null : h("option", { value: "" }, "–"), schema.enum.map((one) => h("option", { value: JSON.stringify(one) }, String(one))));
  else if (schema.type === "integer" || schema.type === "number") input = h("input", { ...props, type: "number", step: schema.type === "integer" ? 1 : "any", min: schema.minimum, max: schema.maximum, value: start ?? "" });
  else if (schema.type === "string") input = long(name, schema) ? h("textarea", { ...props, value: start ?? "" }) : h("input", { ...props, value: start ?? "", maxlength: schema.maxLength });
  else input = h("textarea", { ...props, class: "code", spellcheck: "false", value: start === undefined || start === null ? "" : JSON.stringify(start, null, 2), placeholder: "JSON" });
  return h("label", { class: "field", key: name }, label, input, about);
}

const long = (name, schema) => /text|prompt|body|message|content/.test(name) && !(schema.maxLength < 200);

/** The value of a form: {input} or {problem}. Fields that are empty and optional are left out. */
export function valueOf(fields, form) {
  const input = {};
  for (const { name, schema, required } of fields) {
    const element = form.elements[name];
    if (schema.type === "boolean") {
      if (element.checked || schema.default || required) input[name] = element.checked;
      continue;
    }
    const text = element.value;
    if (text === "" && !(required && schema.type === "string")) continue;
    if (schema.type === "string" && !schema.enum) input[name] = text;
    else if (isPlain(schema) && !schema.enum) input[name] = Number(text);
    else {
      try {
        input[name] = JSON.parse(text);
      } catch (error) {
        return { problem: `${name} is not valid JSON: ${error.message}` };
      }
    }
  }
  return { input };
}
