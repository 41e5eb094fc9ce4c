-- The requests of bench_apps.py; the first argument says which: image, item or events. No two of a few thousand
-- are the same. wrk formats them before it starts the clock.
local COUNT = 2999
local requests, at = {}, 0

local function image(number)
   local pixels = {}
   for place = 1, 64 do
      pixels[place] = (number * 7919 + place * 104729) % 17
   end
   return '{"pixels": [' .. table.concat(pixels, ", ") .. "]}"
end

local function item(number)
   local tags, amounts = {}, {}
   for place = 1, 20 do
      tags[place] = string.format('"tag-%d-%d"', number, place)
      amounts[place] = string.format('"amount-%d": %d.25', place, number + place)
   end
   return string.format(
      '{"name": "item %d", "description": "%s", "price": %d.5, "tags": [%s], "amounts": {%s}}',
      number, string.rep(string.char(97 + number % 26), 200), number,
      table.concat(tags, ", "), table.concat(amounts, ", "))
end

function init(args)
   local kind = args[1]
   for number = 1, COUNT do
      local headers = { ["X-Client"] = string.format("%08x", number * 65537) }
      local method, body = "GET", nil
      if kind == "image" or kind == "item" then
         method = "POST"
         headers["Content-Type"] = "application/json"
         body = kind == "image" and image(number) or item(number)
      end
      requests[number] = wrk.format(method, wrk.path .. "?n=" .. number, headers, body)
   end
end

function request()
   at = at % COUNT + 1
   return requests[at]
end
